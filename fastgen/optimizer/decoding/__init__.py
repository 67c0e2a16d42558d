"""The core of decoding, which knows no host: caches, captured steps, the cost model, reports and verification."""
