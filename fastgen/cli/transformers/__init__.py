"""fastgen-generate-for-transformers; docs/commands.md says where a flag or a message lives."""
