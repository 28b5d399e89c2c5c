"""Reading and writing safetensors checkpoints: headers, index, shards, journal, atomic finish; knows no formats."""
