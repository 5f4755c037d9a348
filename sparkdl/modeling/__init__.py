"""All that is of Keras: a model's variables, what travels of it, its losses, and the backends."""
