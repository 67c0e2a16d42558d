"""Worker processes whose results are handed on in order (ordered_pool.py), and what runs inside of one (worker.py)."""
