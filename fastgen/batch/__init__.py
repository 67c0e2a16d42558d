"""Generation for files and lists of inputs with a model of transformers: the library behind the command.

    BatchConfig ─► run ──► Task: text, chat, speech in, speech out
                    │        prepare ─► Planner ─► collate ─► generate ─► finish     Pipeline: in threads
                    │                                                        │
    INPUT ─► files ─┘                                  records ─► Journal (OUTPUT.part) ─► OUTPUT
    TextGenerator: the same pipeline for Python objects

Errors name settings as in Python; with `BatchConfig.named` the command names them as flags.
"""
