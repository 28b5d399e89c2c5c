"""serve: a checkpoint becomes a service.

command.py, options.py, preflight.py   the command: its options, what is checked before anything is loaded
rank_processes.py, watchdog.py   the processes of a tensor-parallel service, and ranks that hang
rank_zero.py             the first rank: engine and server; rank_engine.py: what each rank computes with
rank_sums.py             which all-reduce the ranks use, and what runs it beside a prefill's computation
engine/, server/         one step after the other; HTTP
collectives/             the quantized all-reduce
tower.py, facts.py       a vision tower on the first rank; what a service says of itself
vllm.py, vllm_plugin/    vLLM in another environment; the all-reduce inside vLLM
"""
