"""The best cut of a model into stages, and how near the best one a cut is proven to be."""
