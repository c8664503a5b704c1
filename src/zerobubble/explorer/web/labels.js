// What the fields of the explorer are called.

export const LABELS = {
  schedule: "schedule", ranks: "ranks (p)", microbatches: "microbatches (m)", stages: "stages per rank (v)", options: "schedule options",
  file: "schedule, plan or PyTorch CSV", versus: "compare with", run: "run of this schedule: Pipeline.timeline, JSON", preset: "preset", forward: "F, forward", backward: "B, input gradient",
  weight: "W, weight gradient", comm: "message", slow_link: "link after rank", slow_comm: "its message, in ms",
  costs: "costs, instead of times", memory: "limit per rank, in microbatches", held: "share kept from B to W",
  model: "model", gpu: "GPU", tp: "tensor parallel (tp)", cp: "context parallel (cp)", ep: "expert parallel (ep)", dp: "replicas (dp)", microbatch: "sequences per microbatch",
  recompute: "recomputed in B",
  sequence_parallel: "sequence parallel: norms and residuals split over tp", overlap_tp: "overlap tp communication with matmuls in F", precision: "precision of matmuls", gradients: "precision of weight gradients", layers: "layers per stage",
};
