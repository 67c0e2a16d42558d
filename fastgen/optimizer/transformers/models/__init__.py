"""What serves one family of models of transformers; the rest of this package serves all of them.

seamless.py           Seamless M4T: its stages, speech encoder, vocoder and positions of its decoders (and of M2M100's)
prophetnet.py         ProphetNet: decode steps with the first predict stream only
latent_attention.py   multi-head latent attention: DeepSeek-V2, -V3 and those after them
images.py             models that take images: those that belong to a row of the prompt
"""
