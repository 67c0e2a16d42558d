"""The fairseq commands: command.py ends them, args.py reads flags, pipeline.py generates, printer.py writes lines."""
