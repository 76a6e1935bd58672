"""What produces the content of a file; readers need none of it.

Modules, bottom up:

- options: the choices there are;  codebooks: centroids, trained tables
- scalar: nearest centroids;  trellis: best paths, by viterbi, compiled
- feedback: errors put right by later weights;  matrix: quantize one matrix;  budget: bits for each of several
- importance: what an architecture tells of its layers;  synthetic: what a run on random tokens tells
- calibration: what layers see of a text;  unfinished: what an interrupted run leaves
- conversion: a model into a file;  elsewhere: by other processes;  plan: what it would do
- evaluation: what that does to predictions
"""
