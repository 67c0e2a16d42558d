"""The lowest and the newest version of each host that counts as tested, for all patches.

On a lower one nothing is patched. On a newer one the first calls of transformers are verified, and fairseq's `generate`
is left to fairseq. They are those that `make matrix` has run, see docs/support.md.
"""

TESTED = {"transformers": ("5.0.0", "5.23.0"), "fairseq": ("0.12.2", "0.12.3")}
