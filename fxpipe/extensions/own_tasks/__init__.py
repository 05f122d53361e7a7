"""Tasks of your own: `fxpipe.define_task`, and the instructions that run them."""
