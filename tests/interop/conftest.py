"""Makes `rows`, the hand-made rows of the training tests, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))
