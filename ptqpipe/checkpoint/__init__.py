"""Reading and writing safetensors checkpoints: headers, index, shards, journal, atomic finish; knows no formats.

header.py, files.py, reader.py, direct.py    an existing folder: headers, files, any bytes of any tensor
open_files.py                                files of which only some are open at a time
in_memory.py                                 a folder whose tensors are in memory
hub.py, fingerprint.py, dtypes.py            which folder a name means, the fingerprint of its content, NaN in it
layout.py, writer.py, finish.py              a folder being written: the place of every byte, its tensors, the end
partial.py, journal.py, lock.py              the hidden folder until it is complete, what is written, who is writing
layer_folder.py, tensor_file.py              folders of statistics and learned codes: one file a decoder layer
fields.py, single_file.py                    reading JSON files, and replacing one file atomically
"""

from ptqpipe.checkpoint.direct import bytes_of, margin
from ptqpipe.checkpoint.fields import COUNT, NUMBER, read_versioned
from ptqpipe.checkpoint.files import (
    FOLDING_FILE,
    INDEX_NAME,
    OWN_FILES,
    PAGES,
    RECORD_FILE,
    TOKENS,
    FolderContent,
    file_sha256,
    is_opened,
    json_bytes,
    natural_key,
    read_json_object,
    refuse_pipes,
    sealed,
    vouches_for_itself,
)
from ptqpipe.checkpoint.header import TensorEntry, shown
from ptqpipe.checkpoint.hub import cached_file, check_disjoint, hub_name, name_of, nearest_path, resolve_source
from ptqpipe.checkpoint.in_memory import holding
from ptqpipe.checkpoint.journal import Journal, RunIdentity, journal_name, read_journal, run_id_of
from ptqpipe.checkpoint.layer_folder import Finished, LayerFolder, OpenFolder
from ptqpipe.checkpoint.layout import ShardLayout, TensorSpec
from ptqpipe.checkpoint.lock import RankLock, holder_of, locked, refuse_held
from ptqpipe.checkpoint.partial import (
    KINDS,
    Paths,
    abandon,
    check_output,
    check_place,
    check_unfinished,
    clear,
    completed_run,
    discard,
    empty,
    has_begun,
    output_errors,
)
from ptqpipe.checkpoint.reader import CheckpointReader, Memory
from ptqpipe.checkpoint.single_file import check_file, write_file
from ptqpipe.checkpoint.tensor_file import is_sealed, write_tensors
from ptqpipe.checkpoint.writer import COPY_BYTES, CheckpointWriter, Mode, TensorWriter
