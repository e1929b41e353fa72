// What is done to the index alone: the same for every table. `places.cuh` stands before it.

extern "C" __global__ void find_all(const u64* __restrict__ keys, u64 buckets, const i64* __restrict__ ids,
                                    i64 n, int* __restrict__ places) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) places[i] = find(keys, buckets, mix((u64)ids[i]));
}

// Gives an id of a batch its place, tells whether it was made for it, and moves the clock on. Every thread of a
// warp calls it, with the same table.
__device__ __forceinline__ int claim_one(u64* keys, u64 buckets, u64* counters, bool there, i64 id, u8 why,
                                         u32 time, bool& fresh) {
  int place = NONE;
  u32 newest = 0;
  fresh = false;
  if (there) {
    if (why == 0) place = claim(keys, buckets, mix((u64)id), fresh);
    if ((why & (UNUSABLE | ELSEWHERE)) == 0) newest = time;
  }
  count(&counters[USED], fresh);
  count(&counters[INSERTED], fresh);
  for (int lanes = 16; lanes > 0; lanes >>= 1)
    newest = max(newest, __shfl_xor_sync(0xffffffffu, newest, lanes));
  if ((threadIdx.x & 31) == 0 && newest > 0 && newest > counters[NEWEST])
    atomicMax(&counters[NEWEST], (u64)newest);
  return place;
}

// Gives every id of a batch its place, and tells which of equal ids made it.
extern "C" __global__ void claim_all(u64* keys, u64 buckets, const i64* __restrict__ ids, i64 n,
                                     const u8* __restrict__ skip, const u32* __restrict__ times, u32 time,
                                     int* __restrict__ places, u8* __restrict__ made, u64* counters) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  const bool there = i < n;
  bool fresh;
  const int place = claim_one(keys, buckets, counters, there, there ? ids[i] : 0,
                              there && skip != nullptr ? skip[i] : 0,
                              there && times != nullptr ? times[i] : time, fresh);
  if (there) {
    places[i] = place;
    made[i] = fresh;
  }
}

// The same for ids that differ and have no place, which may take marked places, too.
extern "C" __global__ void claim_absent(u64* keys, u64 buckets, const i64* __restrict__ ids, i64 n,
                                        int* __restrict__ places, u64* counters) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  bool was_free = false;
  bool was_marked = false;
  if (i < n) {
    const u64 hash = mix((u64)ids[i]);
    int found = NONE;
    if (hash <= MARK) {
      found = claim(keys, buckets, hash, was_free);
    } else {
      u64 bucket = __umul64hi(hash, buckets);
      for (u64 seen = 0; seen < buckets && found == NONE; ++seen) {
        for (int j = 0; j < KEYS && found == NONE; ++j) {
          const u64 place = bucket * KEYS + j;
          u64 key = __ldcg(&keys[place]);
          while (key <= MARK) {  // a marked place that another takes is not free again: this ends
            const u64 before = atomicCAS(&keys[place], key, hash);
            if (before == key) {
              found = (int)place;
              was_free = key == FREE;
              was_marked = key == MARK;
              break;
            }
            key = before;
          }
        }
        if (++bucket == buckets) bucket = 0;
      }
    }
    places[i] = found;
  }
  count(&counters[USED], was_free);
  count(&counters[INSERTED], was_free || was_marked);
  const u32 marks = __ballot_sync(0xffffffffu, was_marked);
  if ((threadIdx.x & 31) == 0 && marks != 0) atomicAdd(&counters[MARKS], (u64)0 - (u64)__popc(marks));
}

// Takes the row from a place; false when another thread has.
__device__ __forceinline__ bool drop(u64* keys, u64 buckets, u64 place, u64* counters) {
  if (place >= buckets * KEYS) {
    if (atomicCAS(&keys[place], HELD, FREE) != HELD) return false;
    atomicAdd(&counters[USED], (u64)0 - 1ULL);
    return true;
  }
  const u64 hash = __ldcg(&keys[place]);
  if (hash <= MARK) return false;
  const u64 first = place / KEYS * KEYS;
  bool open = false;
  for (int j = 0; j < KEYS; ++j) open |= __ldcg(&keys[first + j]) == FREE;
  if (atomicCAS(&keys[place], hash, open ? FREE : MARK) != hash) return false;
  if (open)
    atomicAdd(&counters[USED], (u64)0 - 1ULL);
  else
    atomicAdd(&counters[MARKS], 1ULL);
  return true;
}

extern "C" __global__ void remove_all(u64* keys, u64 buckets, const i64* __restrict__ ids, i64 n,
                                      u64* counters) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  bool gone = false;
  if (i < n) {
    const int place = find(keys, buckets, mix((u64)ids[i]));
    gone = place != NONE && drop(keys, buckets, (u64)place, counters);
  }
  count(&counters[FOUND], gone);
}

extern "C" __global__ void drop_places(u64* keys, u64 buckets, const i64* __restrict__ places, i64 n,
                                       u64* counters) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  bool gone = false;
  if (i < n) gone = drop(keys, buckets, (u64)places[i], counters);
  count(&counters[FOUND], gone);
}

// Counts the rows whose age at `now` reached their time to live, and drops them where told to.
extern "C" __global__ void expire(u64* keys, u64 buckets, const u32* __restrict__ row_times, i64 now,
                                  i64 to_live, const i64* __restrict__ to_live_by_slot, int dropping,
                                  u64* counters) {
  const u64 place = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  bool gone = false;
  if (place < buckets * KEYS + 2 && held_at(keys, buckets, place)) {
    i64 after = to_live;
    if (to_live_by_slot != nullptr)
      after = to_live_by_slot[((u64)unmix(hash_at(keys, buckets, place)) >> 48) & 0x7fff];
    gone = now - (i64)row_times[place] >= after;
    if (gone && dropping) gone = drop(keys, buckets, place, counters);
  }
  count(&counters[FOUND], gone);
}

// Lists the rows with hashes from `first` to `last` that are not newer than `latest`, in any order.
extern "C" __global__ void list_rows(const u64* __restrict__ keys, u64 buckets,
                                     const u32* __restrict__ row_times, u64 first, u64 last, u32 latest,
                                     u64* __restrict__ hashes, i64* __restrict__ places, u64 room,
                                     u64* counters) {
  const u64 place = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  bool wanted = false;
  u64 hash = 0;
  if (place < buckets * KEYS + 2 && held_at(keys, buckets, place)) {
    hash = hash_at(keys, buckets, place);
    wanted = first <= hash && hash <= last && row_times[place] <= latest;
  }
  const u32 ones = __ballot_sync(0xffffffffu, wanted);
  const int lane = threadIdx.x & 31;
  u64 at = 0;
  if (lane == 0 && ones != 0) at = atomicAdd(&counters[FOUND], (u64)__popc(ones));
  at = __shfl_sync(0xffffffffu, at, 0) + __popc(ones & ((1u << lane) - 1));
  if (wanted && at < room) {
    hashes[at] = hash;
    places[at] = (i64)place;
  }
}

// Moves all rows into an index that has none. A warp finds places for 32, then copies row after row.
extern "C" __global__ void move_rows(const u64* __restrict__ keys, u64 buckets,
                                     const u32* __restrict__ row_times, const u32* __restrict__ values,
                                     const u32* __restrict__ states, int value_words, int state_words,
                                     u64* new_keys, u64 new_buckets, u32* __restrict__ new_times,
                                     u32* __restrict__ new_values, u32* __restrict__ new_states) {
  const u64 place = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  const int lane = threadIdx.x & 31;
  int to = NONE;
  if (place < buckets * KEYS + 2 && held_at(keys, buckets, place)) {
    bool fresh = false;
    to = claim(new_keys, new_buckets, hash_at(keys, buckets, place), fresh);
    new_times[to] = row_times[place];
  }
  for (int l = 0; l < 32; ++l) {
    const int into = __shfl_sync(0xffffffffu, to, l);
    if (into == NONE) continue;
    const u64 from = place - lane + l;
    for (int w = lane; w < value_words; w += 32)
      new_values[(u64)into * value_words + w] = values[from * value_words + w];
    for (int w = lane; w < state_words; w += 32)
      new_states[(u64)into * state_words + w] = states[from * state_words + w];
  }
}
