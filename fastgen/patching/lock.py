"""The one lock of the patch layer; forked workers find it free."""

from __future__ import annotations

import os
import threading

# Never held while a host is imported or a host's function runs: a hook takes it while its thread holds an import lock.
LOCK = threading.RLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
