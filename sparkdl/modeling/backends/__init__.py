"""TensorFlow, JAX and torch behind one interface: ``base.Replica``."""
