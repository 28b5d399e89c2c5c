"""What ``data`` names, as rows, and as a model's tokens. Knows no model, and nothing of what the tokens are for.

names.py        which files and data sets an option names, and their weights
stored_rows.py  the rows of a file or a data set as they are stored: text, JSON, CSV, Parquet, Arrow, compressed or not
forms.py        what a row holds: a text, messages or token ids, and what is said about it; values.py and chats.py
                know fields and turns by their names
tokens.py       the tokens of a row, through the model's tokenizer and its chat template

Text that is not the user's never becomes data: a row of another form is mapped, with a line in `Notes`, or refused.
"""

from ptqpipe.calibration.rows.chats import Messages
from ptqpipe.calibration.rows.forms import Notes, read_rows, shows_images, size_of
from ptqpipe.calibration.rows.names import check_once, files_of, is_data_file, weighted
from ptqpipe.calibration.rows.tokens import begin_token, begun, end_token, has_beginning, pieces, row_text, row_tokens

__all__ = [
    "Messages",
    "Notes",
    "begin_token",
    "begun",
    "check_once",
    "end_token",
    "files_of",
    "has_beginning",
    "is_data_file",
    "pieces",
    "read_rows",
    "row_text",
    "row_tokens",
    "shows_images",
    "size_of",
    "weighted",
]
