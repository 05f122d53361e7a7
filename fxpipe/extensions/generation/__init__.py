"""``pipe.generate`` of transformers over ranks and GPUs; each stage keeps its keys and values."""
