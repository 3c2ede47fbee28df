"""The HTTP service: one thread owns the model, and requests of many clients share its batches."""
