"""Algorithms: the weights of one unit in, QTensors out. They choose scales by a search and must not know files."""
