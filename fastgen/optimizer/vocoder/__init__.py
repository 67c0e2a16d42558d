"""Vocoders: HiFi-GAN generators (Kong et al., 2020), which make a waveform of a spectrogram or of units, and SEANet
decoders (EnCodec, Défossez et al., 2022), which make one of a codec's states. Knows no host.

hifi_gan.py       the layers of a generator, and its forward
seanet.py         the layers of a SEANet decoder, and its forward
convolutions.py   the two ways of computing a convolution and what follows it: torch's, and oneDNN's on a CPU
weights.py        the plain weight of a layer with weight norm, kept as long as it is right
layers.py         which layers are known, and why others are not
faster.py         one call of a generator or decoder: which way, and why not
"""
