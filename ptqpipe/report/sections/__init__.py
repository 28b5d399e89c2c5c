"""From a report's numbers to what each section of the page shows: groups, charts, rows of tables. No HTML here.

quality.py        the headline numbers of an evaluation
errors.py         error by layer and role, the worst weights
choices.py        what each choice of scales bought
calibration.py    what calibration bought
scales.py         scales, clipping, underflow
precision_map.py  layers by roles, coloured by format
tensors.py        every tensor

roles.py, words.py, drawn.py  what they share: weights by role, words for weights, a chart in two widths
"""
