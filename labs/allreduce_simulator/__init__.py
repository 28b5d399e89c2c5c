"""What an AllReduce costs in error and in time, computed in one process for any number of ranks.

inputs.py      what the ranks put in
partials.py    the same from a file
codecs.py      what sending does to numbers
schemes.py     the order in which a scheme sends and adds
error.py       the error that comes out, exactly, and its closed form
topologies.py  machines: bandwidths and latencies, each with its source
time.py        seconds of a scheme on a machine
compare.py     plain against quantized, and the break-even
request.py     a comparison by names
text.py        its tables
plots.py       its plots
"""
