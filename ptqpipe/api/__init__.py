"""The Python API: every command as a function of the same name, and what only Python has.

convert.py, rewrite.py, calibrate.py, check.py   the commands, in the files of the same names in ``cli/``
models.py, transformers_config.py    a model in memory; quantizing while transformers loads
server_process.py        a service that runs inside a with block
matrices.py              one matrix, and the weights of a checkpoint
calls.py, kinds.py, calibration_data.py, result.py
                         keywords and errors, kinds of values, calibration data, what a call returns

``ptqpipe/__init__.py`` lists the names.
"""
