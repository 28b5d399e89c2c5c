"""Studies beside the product: a folder for each, with its question and answer, its script and its result lines.

``python -m labs.STUDY`` runs one, from the root of the repository.
"""

import sys
from pathlib import Path

# Studies use helpers of the benches, and these import each other by name, as scripts do that lie in one folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
