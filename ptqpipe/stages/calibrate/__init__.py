"""calibrate: statistics of every linear layer's input, layer by layer."""
