"""Vocoders on a CPU: HiFi-GAN generators (Kong et al., 2020), which make a waveform of a spectrogram or of units, and
SEANet decoders (EnCodec, Défossez et al., 2022), which make one of a codec's states. Knows no host.

convolutions.py   one-dimensional convolutions by oneDNN, channels last
parts.py          what a generator or decoder is made of, whatever its host calls it, and its forward
forward.py        one forward: whether it is computed here, and why not
"""
