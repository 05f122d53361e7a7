"""``pipe.load_hub`` and ``pipe.save_hub``: weights as the hub of Hugging Face has them."""
