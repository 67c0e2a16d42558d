"""Code for single families of models of transformers; the rest of this package serves all of them.

seamless.py           Seamless M4T: its stages, speech encoder, vocoder and the positions of its decoders (and M2M100's)
prophetnet.py         ProphetNet: decode steps with the first predict stream only
latent_attention.py   multi-head latent attention: DeepSeek-V2, -V3 and their successors
images.py             models that take images: which images belong to which row of the prompt
"""
