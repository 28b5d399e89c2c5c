"""The Python API: every command as a function of the same name, and what only Python has.

commands.py, rewriting.py, checks.py   the commands that write, and those that only read
models.py, transformers_config.py    a model in memory; quantizing while transformers loads
server_process.py        a service that runs inside a with block
matrices.py              one matrix, and the weights of a checkpoint
calls.py, kinds.py, calibration_data.py, result.py
                         keywords and errors, kinds of values, calibration data, what a call returns

``ptqpipe/__init__.py`` lists the names.
"""
