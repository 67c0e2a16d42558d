"""The command fastgen-generate-for-transformers, see docs/commands.md."""
