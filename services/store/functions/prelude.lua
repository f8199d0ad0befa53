-- Helpers that all functions share. Every function takes one key, the run's prefix `grpo:{NAME}`, and builds names from it as
-- services/protocol/keys.py does. A function is atomic and one entry of the append-only file.

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Return the run's own time, ms, for leases, freezes and heartbeats. It passes as the server's clock does, but never goes back:
-- if the server's clock is behind the time that the run has seen (a failover, a step of NTP), it stands still until `tick`.
local function run_ms(prefix)
  local seen = redis.call('HMGET', prefix .. ':run', 'clock_ms', 'clock_ahead_ms')
  return math.max(now_ms() + (tonumber(seen[2]) or 0), tonumber(seen[1]) or 0)
end

-- Return the run's time, and store it; also how far it is ahead of the server's clock. If the server's clock went back, the run's
-- time advances again, ahead of that clock from now on. Called at least every few seconds of a run, by the calls that lead or
-- claim.
local function tick(prefix)
  local run, clock = prefix .. ':run', now_ms()
  local seen = redis.call('HMGET', run, 'clock_ms', 'clock_ahead_ms', 'protocol')
  local last, ahead = tonumber(seen[1]) or 0, tonumber(seen[2]) or 0
  if clock + ahead < last then ahead = last - clock end
  if seen[3] then redis.call('HSET', run, 'clock_ms', clock + ahead, 'clock_ahead_ms', ahead) end
  return clock + ahead, ahead
end

-- Each topic has a channel, so that a process receives only what it waits for. The topics are in services/protocol/keys.py.
local function notify(prefix, topic)
  redis.call('PUBLISH', prefix .. ':notifications:' .. topic, topic)
end

local function number(prefix, field)
  return tonumber(redis.call('HGET', prefix .. ':run', field))
end

-- Return the next `n` fencing numbers of a kind, as text. No number is ever returned twice, not even by a server that lost its
-- last second of writes in a crash: they start at the clock in µs, or after the last one if that is later.
local function next_fences(prefix, field, n)
  local time, fences = redis.call('TIME'), {}
  local first = math.max((number(prefix, field) or 0) + 1, tonumber(time[1]) * 1000000 + tonumber(time[2]))
  for i = 1, n do fences[i] = string.format('%.0f', first + i - 1) end
  if n > 0 then redis.call('HSET', prefix .. ':run', field, fences[n]) end
  return fences
end

-- Call one command with a list after its first arguments, in pieces that Lua's stack can hold. Returns the sum of the replies.
local function call_over(list, ...)
  local sum = 0
  for i = 1, #list, 1000 do
    local args = {...}
    for j = i, math.min(i + 999, #list) do args[#args + 1] = list[j] end
    sum = sum + redis.call(unpack(args))
  end
  return sum
end

local function count(prefix, field, by)
  redis.call('HINCRBY', prefix .. ':ledger', field, by)
end

local function free_slots(prefix, n)
  if n ~= 0 then
    redis.call('HINCRBY', prefix .. ':run', 'slots_used', -n)
    notify(prefix, 'slots')
  end
end

-- Return why the state of dataprep must not be changed now, or nil: it is being copied or loaded (snapshot.lua). If the copying
-- process is gone, this lasts no longer than its lease.
local function busy(prefix)
  local run = prefix .. ':run'
  local held = redis.call('HMGET', run, 'frozen_until_ms', 'restoring')
  if held[2] then return redis.error_reply('BUSY the run is being restored to step ' .. held[2]) end
  if not held[1] then return end
  if run_ms(prefix) < tonumber(held[1]) then return redis.error_reply('BUSY a snapshot is being taken') end
  redis.call('HDEL', run, 'frozen_by', 'frozen_until_ms')
end

-- Return nil if the caller holds the fencing number `field` of the run and may proceed, otherwise the error to return.
local function fenced(prefix, field, fence)
  if redis.call('HGET', prefix .. ':run', field) ~= fence then
    return redis.error_reply('FENCED ' .. field .. ' ' .. fence .. ' was superseded')
  end
  if field == 'leader_fence' then return busy(prefix) end
end

-- Register a function of the arguments `expected`. A full server still accepts functions that move work on and so free memory; it
-- rejects only those that add to it (`grows`).
local function register(name, expected, body, grows)
  redis.register_function{
    function_name = LIBRARY .. '_' .. name,
    callback = function(keys, args) return invalid(name, expected, args) or body(keys[1], args) end,
    flags = grows and {} or {'allow-oom'},
  }
end

-- Register a function whose first argument is the fencing number `field` of the run; a caller that has lost it is rejected.
local function register_fenced(field, name, expected, body, grows)
  local all = {'fence', NATURAL}
  for i = 1, #expected do all[#all + 1] = expected[i] end -- while it loads, a library has no ipairs
  register(name, all, function(prefix, args)
    return fenced(prefix, field, args[1]) or body(prefix, args)
  end, grows)
end

local function register_leader(name, expected, body, grows) register_fenced('leader_fence', name, expected, body, grows) end

local function register_trainer(name, expected, body, grows) register_fenced('trainer_fence', name, expected, body, grows) end

-- Return whether a call comes late: the caller, who holds `fence`, numbers its calls in ascending order, and one with this number
-- or a higher one was here before. `field` of the hash `key` stores the last.
local function overtaken(key, field, fence, ordinal)
  local by, last = string.match(redis.call('HGET', key, field) or '', '^(%S+) (%d+)$')
  if by == fence and tonumber(last) >= tonumber(ordinal) then return true end
  redis.call('HSET', key, field, fence .. ' ' .. ordinal)
end

-- Return the arguments from `first` on as records with these fields, one after the other.
local function records(args, first, ...)
  local fields, found = {...}, {}
  for i = first, #args, #fields do
    local record = {}
    for j, field in ipairs(fields) do record[field] = args[i + j - 1] end
    found[#found + 1] = record
  end
  return found
end

-- Maximum bytes of a header, or of the body of a dead letter: a group of thousands of completions has a header of a tenth of it.
local ENTRY_BYTES = 1048576
local REASON_BYTES = 4096

-- Store `what` of `name` in the hash `memory`, whose names are in the zset `order` by `now`. Keeps the last 10,000.
local REMEMBERED = 10000

local function remember(memory, order, name, what, now)
  local latest = redis.call('ZREVRANGE', order, 0, 0, 'WITHSCORES')[2]
  redis.call('HSET', memory, name, what)
  redis.call('ZADD', order, math.max(now, tonumber(latest) or 0), name) -- after the others, even if the clock went back
  if redis.call('ZCARD', order) > REMEMBERED then redis.call('HDEL', memory, redis.call('ZPOPMIN', order)[1]) end
end

-- Return the answer to an earlier call with this token, or nil. A call whose effect others may undo meanwhile has a random token, so
-- that it takes effect once even if it arrives again much later.
-- owns: answers       hash  token -> answer
--       answers:order zset  the same tokens by time
local function answered(prefix, token)
  return redis.call('HGET', prefix .. ':answers', token) or nil
end

local function record_answer(prefix, token, reply)
  remember(prefix .. ':answers', prefix .. ':answers:order', token, reply, now_ms())
  return reply
end

-- Return what a claimer's last call took, as a list, if this call repeats it, and an empty list if it repeats an earlier one;
-- otherwise nil. Processes are told apart by `boot`, and number their calls in ascending order. The hash `key` has claimer ->
-- "<boot> <ordinal> <what it took> …".
local function taken_before(key, claimer, boot, ordinal)
  local last, said = {}, redis.call('HGET', key, claimer) or ''
  for word in string.gmatch(said, '%S+') do last[#last + 1] = word end
  if last[1] ~= boot or tonumber(last[2]) < tonumber(ordinal) then return end
  if tonumber(last[2]) > tonumber(ordinal) then return {} end
  table.remove(last, 1)
  table.remove(last, 1)
  return last
end

local function record_taken(key, claimer, boot, ordinal, taken)
  redis.call('HSET', key, claimer, boot .. ' ' .. ordinal .. ' ' .. table.concat(taken, ' '))
end

-- A ticket waits in one of four streams, since no consumer can choose among the entries of a stream: tickets that generators
-- complete, and tickets whose rollouts run in environments; each to train on, or of the open evaluation round. Entries of `tickets`
-- are named by the time, those of the others <lane>-1, <lane>-2, …, so an entry names its stream and no two tickets share one.
-- owns: tickets, tickets:rollouts, eval:tickets, eval:tickets:rollouts; run.numbered_entries: the last number
local function stream_of(prefix, entry)
  local lane = string.match(entry, '^([123])%-')
  if lane == '1' then return prefix .. ':tickets:rollouts', 'environments' end
  if lane == '2' then return prefix .. ':eval:tickets', 'generators' end
  if lane == '3' then return prefix .. ':eval:tickets:rollouts', 'environments' end
  return prefix .. ':tickets', 'generators'
end

-- Return the lane of tickets that are for environments, or not, and of the evaluation round, or not; each '1' or '0'.
local function lane_of(rollouts, evaluates)
  return tostring((rollouts == '1' and 1 or 0) + (evaluates == '1' and 2 or 0))
end

-- Return whether an entry is a ticket of the evaluation round.
local function of_round(entry)
  return string.match(entry, '^[23]%-') ~= nil
end

-- Add a ticket to the stream of a lane.
local function add_ticket(prefix, lane, ticket, body)
  if lane == '0' then
    redis.call('XADD', prefix .. ':tickets', '*', 'ticket', ticket, 'body', body)
  else
    local entry = lane .. '-' .. redis.call('HINCRBY', prefix .. ':run', 'numbered_entries', 1)
    redis.call('XADD', stream_of(prefix, entry), entry, 'ticket', ticket, 'body', body, 'issued_ms', now_ms())
  end
end

-- Delete tickets that have ended, by entry.
local function forget_tickets(prefix, entries)
  for _, entry in ipairs(entries) do
    local stream, group = stream_of(prefix, entry)
    redis.call('XACK', stream, group, entry)
    redis.call('XDEL', stream, entry)
  end
  for _, hash in ipairs({':claims', ':attempts', ':expiries'}) do call_over(entries, 'HDEL', prefix .. hash) end
end

-- Delete a consumer of a stream unless some of its leases still have to expire. One that reads again exists again.
local function delete_consumer(stream, group, name)
  if #redis.call('XPENDING', stream, group, '-', '+', 1, name) == 0 then redis.call('XGROUP', 'DELCONSUMER', stream, group, name) end
end

-- Store why a ticket was dropped, for inspection (store/inspection.py).
-- owns: drops       hash  ticket -> "<ms> <outcome>", of a dead letter `failed <entry of the stream>`
--       drops:order zset  the same tickets by time
local function remember_drop(prefix, ticket, outcome)
  local now = now_ms() -- once: Redis 7.0 lets the clock advance within a function
  remember(prefix .. ':drops', prefix .. ':drops:order', ticket, now .. ' ' .. outcome, now)
end

-- Add a dead letter. Keeps the last 10,000 or slightly more; the ledger counts them all. `outcome` is what the ledger counts the
-- ticket as: `failed`, or nil for a ticket that was never issued.
local function dead_letter(prefix, ticket, reason, body, outcome)
  local entry = redis.call('XADD', prefix .. ':deadletter', 'MAXLEN', '~', 10000, '*', 'ticket', ticket, 'reason',
    string.sub(reason, 1, REASON_BYTES), 'body', string.sub(body, 1, ENTRY_BYTES), 'outcome', outcome or 'unknown')
  if outcome then remember_drop(prefix, ticket, outcome .. ' ' .. entry) end
end

local function bury(prefix, ticket, reason, body)
  dead_letter(prefix, ticket, reason, body, 'failed')
  count(prefix, 'failed', 1)
end

-- Groups that end without being trained wait here for the sample log (services/tracker/sample_log.py), instead of being deleted with
-- their tokens. Only while a tracker renews its lease, and only as many as these: a tracker that is gone or slow costs a bounded
-- part of memory and delays nothing. Groups in the log's share that are not kept are counted.
-- owns: samples       stream  ticket, outcome, payload, header, step that was being prepared, incarnation, size
--       samples:state hash    lease, share, bytes that wait, last logged step, what was missed, by outcome,
--                             and the first step of each incarnation that a restore began
local SAMPLES_KEPT = 2048
local SAMPLE_BYTES = 67108864

-- Return whether a ticket is in the sample log's share: its hash is below `share`, of 2^32.
local function is_sampled(share, ticket)
  return share and tonumber(string.sub(redis.sha1hex(ticket), 1, 8), 16) < tonumber(share)
end

-- Return roughly the size of a group's tokens in bytes, as its header says.
local function payload_size(payload, header)
  if payload == '' then return 0 end
  local read, fields = pcall(cmsgpack.unpack, header)
  return read and type(fields) == 'table' and math.max(tonumber(fields[6]) or 0, 0) or 0
end

-- Keep a group for the sample log, with the first REASON_BYTES of its outcome. `payload`: name of its tokens, or '' if it has
-- none. Returns true if the log is now responsible for them; otherwise the caller deletes them.
local function keep_sample(prefix, ticket, outcome, header, payload)
  local state = prefix .. ':samples:state'
  outcome = string.sub(outcome, 1, REASON_BYTES)
  local held = redis.call('HMGET', state, 'share', 'until_ms', 'bytes')
  if not is_sampled(held[1], ticket) then return false end
  local size = #outcome + #header + payload_size(payload, header)
  local bytes = (tonumber(held[3]) or 0) + size
  if run_ms(prefix) >= tonumber(held[2]) or bytes > SAMPLE_BYTES or redis.call('XLEN', prefix .. ':samples') >= SAMPLES_KEPT then
    redis.call('HINCRBY', state, 'missed:' .. string.match(outcome, '^[^:]*'), 1)
    return false
  end
  redis.call('XADD', prefix .. ':samples', '*', 'ticket', ticket, 'outcome', outcome, 'payload', payload, 'header', header,
    'step', number(prefix, 'prepared_step') + 1, 'incarnation', number(prefix, 'incarnation'), 'size', size)
  redis.call('HSET', state, 'bytes', bytes)
  return true
end

-- Return whether the sample log has the groups that a step trained, in this incarnation of the run.
local function is_logged(prefix, step)
  local held = redis.call('HMGET', prefix .. ':samples:state', 'logged', 'logged_in')
  return held[2] == redis.call('HGET', prefix .. ':run', 'incarnation') and tonumber(held[1]) >= step
end

-- Count the groups that a step trained as missed, as far as they are in the log's share: the step is deleted before they are logged.
local function miss_step(prefix, step)
  local state, missed = prefix .. ':samples:state', 0
  local share = redis.call('HGET', state, 'share')
  for group in string.gmatch(redis.call('HGET', prefix .. ':step:' .. step, 'groups') or '', '%S+') do
    if is_sampled(share, group) then missed = missed + 1 end
  end
  if missed > 0 then redis.call('HINCRBY', state, 'missed:trained', missed) end
end

-- Keys of an open evaluation round, `eval:<part>`: evaluation.lua owns them, a restore deletes them.
local EVALUATION_PARTS = {'round', 'tickets', 'tickets:rollouts', 'volunteers', 'results'}
