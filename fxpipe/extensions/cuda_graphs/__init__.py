"""The computations of stages as captured CUDA graphs, for ``fxpipe.CudaGraphs``."""
