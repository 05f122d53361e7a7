"""An interactive page of simulations, drawn by bokeh."""
