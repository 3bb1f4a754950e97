"""The front door: train(), the builder, the handle and its metrics."""
