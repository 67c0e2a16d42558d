"""Generates for files and lists of inputs with a model of transformers: the library that the command is made of.

    BatchConfig ─► run ──► Task: text, chat, speech in, speech out
                    │        prepare ─► Planner ─► collate ─► generate ─► finish     Pipeline: in threads
                    │                                                        │
    INPUT ─► files ─┘                                  records ─► Journal (OUTPUT.part) ─► OUTPUT
    TextGenerator: the same pipeline for inputs of Python

Errors name settings as they are written in Python; `BatchConfig.named` lets the command write them as flags.
"""
