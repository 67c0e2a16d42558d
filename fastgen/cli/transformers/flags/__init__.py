"""Flags of fastgen-generate-for-transformers.

run_config.py         all of them; arguments.py: their parser and --help; argument_types.py: what they accept
flag_checks.py        what contradicts
generation_config.py  --generation_config and --gen; languages.py: --src_lang, --tgt_lang, --forced_bos_token
"""
