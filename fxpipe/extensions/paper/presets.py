"""Devices by their data sheets.

Links have what transfers reach: four fifths of NVLink, nine tenths of a network.
"""

from __future__ import annotations

from fxpipe.extensions.paper.device import Device
from fxpipe.extensions.simulator.costs import Link

_GIB = 2**30

P40 = Device(
    flops=11.76e12,
    bandwidth=346e9,
    memory=22.4 * _GIB,
    streaming=0.9,
    units=30,
    tile=32,
    launch=5e-6,
    context=300 * 2**20,
    host=11e9,
    link=Link(2e-5, 11e9),
    network=Link(3e-5, 1.1e9),
    name="P40",
)
"""NVIDIA Tesla P40, 24 GB. Data sheet DS-08414: 12 TFLOP/s in single precision (11.76 at 1531 MHz
of 3840 cores in 30 multiprocessors), which half precision does not exceed, 346 GB/s; PCIe 3.0 ×16,
of whose 15.75 GB/s copies through the host reach about 11; 10 Gbit/s Ethernet. cuDNN's kernels in
single precision have tiles of 32 to 128."""


V100 = Device(
    flops=125e12,
    single=15.7e12,
    bandwidth=900e9,
    memory=31.7 * _GIB,
    streaming=0.9,
    units=80,
    launch=5e-6,
    context=400 * 2**20,
    host=11e9,
    link=Link(1e-5, 120e9),
    network=Link(2e-5, 11.2e9),
    name="V100",
)
"""NVIDIA V100 SXM2, 32 GB. Data sheet of January 2020: 125 TFLOP/s of tensor cores, 15.7 in single
precision, 900 GB/s, 80 multiprocessors; NVLink 300 GB/s in both directions together; a network of
100 Gbit/s for each device."""

A100 = Device(
    flops=312e12,
    single=19.5e12,
    bandwidth=2039e9,
    memory=79.2 * _GIB,
    streaming=0.9,
    units=108,
    launch=5e-6,
    context=500 * 2**20,
    host=22e9,
    link=Link(1e-5, 240e9),
    network=Link(2e-5, 22.5e9),
    name="A100",
)
"""NVIDIA A100 SXM4, 80 GB. Data sheet of June 2021: 312 TFLOP/s of tensor cores, 19.5 in single
precision without them, 2039 GB/s, 108 multiprocessors; NVLink 600 GB/s in both directions together;
DGX A100: HDR InfiniBand, 200 Gbit/s for each device."""

H100 = Device(
    flops=989.4e12,
    single=67e12,
    bandwidth=3350e9,
    memory=79.1 * _GIB,
    streaming=0.9,
    units=132,
    launch=5e-6,
    context=600 * 2**20,
    host=45e9,
    link=Link(5e-6, 360e9),
    network=Link(1e-5, 45e9),
    name="H100",
)
"""NVIDIA H100 SXM5, 80 GB. Data sheet of 2023: 989.4 TFLOP/s of tensor cores in 16 bits without
sparsity (1978.9 in 8 bits: ``dataclasses.replace(H100, flops=1978.9e12)``), 67 in single precision,
3.35 TB/s, 132 multiprocessors; NVLink 900 GB/s in both directions together; DGX H100: NDR
InfiniBand, 400 Gbit/s for each device."""

H200 = Device(
    flops=989.4e12,
    single=67e12,
    bandwidth=4800e9,
    memory=139.8 * _GIB,
    streaming=0.9,
    units=132,
    launch=5e-6,
    context=600 * 2**20,
    host=45e9,
    link=Link(5e-6, 360e9),
    network=Link(1e-5, 45e9),
    name="H200",
)
"""NVIDIA H200 SXM, 141 GB. Data sheet of 2024: as H100, with 4.8 TB/s."""

TPU_V3 = Device(
    flops=61.5e12,
    bandwidth=450e9,
    memory=16 * _GIB,
    streaming=0.9,
    units=2,
    launch=2e-6,
    link=Link(5e-6, 65e9),
    network=Link(5e-6, 65e9),
    name="TPU v3",
)
"""A core of Google's TPU v3, of which a chip has two. Jouppi et al., A Domain-Specific
Supercomputer for Training Deep Neural Networks, CACM 2020: 123 TFLOP/s and 900 GB/s a chip, 32 GiB,
two matrix units of 128 × 128 a core; four links a chip of 656 Gbit/s each, which cores of all chips
of a pod have."""

PRESETS = {
    "P40": P40,
    "V100": V100,
    "A100": A100,
    "H100": H100,
    "H200": H200,
    "TPUv3": TPU_V3,
}
"""Name on the command line → device."""
