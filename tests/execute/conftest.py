"""Measurements of operators go to a folder of their own, kept for the whole run."""

import os
import tempfile

os.environ.setdefault("ELBOWROOM_CACHE", os.path.join(tempfile.gettempdir(), f"elbowroom-tests-{os.getuid()}"))
