"""calibrate: statistics of every linear layer's input, block by block."""
