"""The lowest and the newest version of each host that counts as tested, for all patches.

On a lower one nothing is patched, on a newer one the first calls are compared with the library's. docs/support.md lists
what `make matrix` has run.
"""

TESTED = {"transformers": ("5.0.0", "5.23.0"), "fairseq": ("0.12.0", "0.12.3")}
