"""What is trained: a decoder with its text, on its devices, taught by example first if need be."""
