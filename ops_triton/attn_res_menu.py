"""stub"""
KERNELS = ()
