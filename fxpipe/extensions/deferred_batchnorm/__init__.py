"""Statistics of BatchNorm over whole batches, for ``fxpipe.DeferredBatchNorm``."""
