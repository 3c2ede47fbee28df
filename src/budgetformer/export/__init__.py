"""A trained model as an ONNX graph: writing it, checking it, running it."""
