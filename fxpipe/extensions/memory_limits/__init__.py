"""``memory_limits=``: cuts of a model whose devices are predicted to hold no more than they may."""
