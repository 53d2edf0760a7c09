"""The benchmark of whole models under admission; `kvsim.bench_admission.bench` says what is measured."""
