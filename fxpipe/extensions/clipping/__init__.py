"""What ``compile(..., clip_norm=, scaler=)`` clips by: one norm of the gradients of all stages."""
