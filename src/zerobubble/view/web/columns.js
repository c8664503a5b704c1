// Columns of numbers as `packing.py` writes them: base64 of deflated arrays.

const ARRAYS = { i4: Int32Array, f8: Float64Array };

export async function unpack({ type, data }) {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new ARRAYS[type](await new Response(stream).arrayBuffer());
}

// The sums of everything up to each place: undoes differences.
export function summed(differences) {
  const sums = new Float64Array(differences.length);
  let sum = 0;
  for (let i = 0; i < differences.length; i++) sums[i] = sum += differences[i];
  return sums;
}
