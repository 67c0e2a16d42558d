"""The fairseq commands: command.py begins and ends them, args.py reads flags, pipeline.py runs fairseq's own loop."""
