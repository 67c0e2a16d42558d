"""The commands: flags, progress, exit statuses and signals; fastgen.batch does the work."""
