// A rank's row when its passes are too narrow for boxes: for each few pixels of time, the shares of the kinds stacked, idle time on top.

const BIN = 3;

// How much of each bin each kind takes, 0 to 1.
export function shares(passes, rank, from, to, bins) {
  const kinds = passes.kinds.length;
  const filled = new Float32Array(bins * kinds);
  const { start: starts, end: ends, kind, lane } = passes;
  const scale = bins / (to - from);
  const stop = passes.first[rank + 1];
  for (let i = passes.firstEndingAfter(rank, from); i < stop && starts[i] < to; i++) {
    const part = lane[i] ? 0.5 : 1;
    const begin = Math.max(0, (starts[i] - from) * scale);
    const end = Math.min(bins, (ends[i] - from) * scale);
    for (let bin = Math.floor(begin); bin < end; bin++) {
      filled[bin * kinds + kind[i]] += part * (Math.min(end, bin + 1) - Math.max(begin, bin));
    }
  }
  return filled;
}

// Stacks the shares of a rank from `from` on into `pixels`, the first of which is at `begin` and which are `stride` apart from line to line.
export function drawDensity(pixels, place, passes, rank, from, nsPerPixel, colors, hatches) {
  const { begin, stride, width, height, ratio } = place;
  const size = Math.max(1, Math.round(BIN * ratio));
  const bins = Math.ceil(width / size);
  const filled = shares(passes, rank, from, from + bins * size * nsPerPixel, bins);
  const kinds = colors.length;
  for (let bin = 0; bin < bins; bin++) {
    const left = begin + bin * size;
    const right = Math.min(begin + width, left + size);
    let floor = height;
    let sum = 0;
    for (let kind = 0; kind <= kinds && floor > 0; kind++) {
      sum += kind < kinds ? filled[bin * kinds + kind] : 1;
      const top = kind < kinds ? Math.max(0, Math.round(height * (1 - sum))) : 0;
      for (let line = top; line < floor; line++) {
        const idle = hatches[line % hatches.length];
        for (let x = left; x < right; x++) pixels[line * stride + x] = kind < kinds ? colors[kind] : idle[x - begin];
      }
      floor = Math.min(floor, top);
    }
  }
}
