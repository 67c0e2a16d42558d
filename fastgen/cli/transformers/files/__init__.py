"""The files of a run.

paths.py            INPUT, OUTPUT and references, checked before anything slow happens
lines.py            reading INPUT in small parts; records.py: its JSON records
whole_file.py       files that appear whole or not at all; standard_output.py: OUTPUT -
sound_folder.py     OUTPUT.audio, the sounds of models that speak
"""
