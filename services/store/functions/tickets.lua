-- Tickets: issue, claim, renew, release, fail, submit, and the turns of a rollout.
-- reads and writes: run, headers, outstanding, ledger, deadletter, partial:<ticket>, payload:<ticket>.<fence>
-- owns:             claims   hash  stream entry -> "<consumer>|<fence>", the one that may submit
--                   attempts hash  stream entry -> failures reported
--                   expiries hash  stream entry -> leases that expired
--                   claimed  hash  consumer -> "<boot> <ordinal> <entry> …", its last claim, to answer a repeated call
--                   reissue  zset  tickets that a restore interrupted, to be issued again -> issue sequence; also outstanding
--                   turns:<ticket>   hash  "<sample>" -> times its rollout started again, "<sample>:<place>" -> a turn or a reply
--                   the streams of tickets (prelude.lua, `stream_of`), except that evaluation.lua begins and ends those of a round
--                   order    hash  `state` of the prompt order, and `rows:<source>` of each source's epoch, int32
-- A ticket's entry stays in its stream until it is submitted or becomes a dead letter, so it is always in exactly one place. A
-- ticket of an evaluation round has the same claims, leases, failures and turns; it ends as a result of its round, or ends the round.

local function owns(prefix, consumer, entry, fence)
  return redis.call('HGET', prefix .. ':claims', entry) == consumer .. '|' .. fence
end

-- Return the consumers that claimed these entries, as a set.
local function holders(prefix, entries)
  local names = {}
  for _, entry in ipairs(entries) do
    local name = string.match(redis.call('HGET', prefix .. ':claims', entry[1]) or '', '^(.*)|%d+$')
    if name then names[name] = true end
  end
  return names
end

-- Let the next claim take the entry at once, by making it idle for longer than any lease.
local function hand_back(prefix, consumer, entry)
  local stream, group = stream_of(prefix, entry)
  redis.call('XCLAIM', stream, group, consumer, 0, entry, 'IDLE', 4000000000, 'JUSTID')
  redis.call('HDEL', prefix .. ':claims', entry)
  notify(prefix, of_round(entry) and 'evaluation' or 'tickets')
end

local function give_up(prefix, entry, ticket, reason, body)
  forget_tickets(prefix, {entry})
  redis.call('DEL', prefix .. ':partial:' .. ticket, prefix .. ':turns:' .. ticket)
  if of_round(entry) then -- which can no longer be completed
    redis.call('HSETNX', prefix .. ':eval:round', 'fault', 'ticket ' .. ticket .. ': ' .. reason)
    notify(prefix, 'evaluation')
  elseif redis.call('ZREM', prefix .. ':outstanding', ticket) == 1 then
    keep_sample(prefix, ticket, 'failed:' .. reason, body, '')
    bury(prefix, ticket, reason, body)
    free_slots(prefix, 1)
  else
    dead_letter(prefix, ticket, reason, body)
    count(prefix, 'unknown_tickets', 1)
  end
end

-- Return the entries that may be retried: a lease that expired while it was held may have expired with its generator.
local function survivors(prefix, entries, limit)
  local alive = {}
  for _, entry in ipairs(entries) do
    local id, fields = entry[1], entry[2]
    if not fields then
      forget_tickets(prefix, {id})
    elseif redis.call('HEXISTS', prefix .. ':claims', id) == 1 and redis.call('HINCRBY', prefix .. ':expiries', id, 1) > limit then
      give_up(prefix, id, fields[2], 'its lease expired ' .. limit .. ' times: it may crash its generator', fields[4] or '')
    else
      alive[#alive + 1] = entry
    end
  end
  return alive
end

-- Restart the leases of all claims if the server's clock went back since the last claim: streams measure them by that clock, so
-- they would all last longer by as much as it went back.
local function renew_after_step(prefix)
  local _, ahead = tick(prefix)
  if ahead == (number(prefix, 'leases_ahead_ms') or 0) then return end
  redis.call('HSET', prefix .. ':run', 'leases_ahead_ms', ahead)
  local claims = redis.call('HGETALL', prefix .. ':claims')
  for i = 1, #claims, 2 do
    local stream, group = stream_of(prefix, claims[i])
    redis.call('XCLAIM', stream, group, string.match(claims[i + 1], '^(.*)|'), 0, claims[i], 'JUSTID')
  end
end

-- args: leader fence, cursor, order (state of the prompt order after these), how many of the first tickets come from `requeued`, a
-- text with a 1 in the place of each ticket that is for environments,
-- number of epochs that begin, name and rows of each, then ticket id and body of each.
-- Returns how many were issued: all, or 0 if the cursor has moved on, which makes a repeated call harmless; also 0 if there are
-- fewer free slots, or the requeued tickets differ.
register_leader('issue', {
  'cursor', NATURAL, 'order', TEXT, 'requeued', NATURAL, 'rollouts', TEXT, 'epochs', NATURAL,
  EACH, 'name', TEXT, 'body', TEXT,
}, function(prefix, args)
  local cursor, requeued, epochs = number(prefix, 'cursor'), tonumber(args[4]), tonumber(args[6])
  local tickets = records(args, 7 + 2 * epochs, 'id', 'body')
  local n = #tickets
  for _, ticket in ipairs(tickets) do
    if not TICKET.fits(ticket.id) then return redis.error_reply('INVALID ticket ' .. ticket.id .. ' is not of the form <epoch>-<row>') end
  end
  if cursor ~= tonumber(args[2]) or n > number(prefix, 'slots') - number(prefix, 'slots_used') then return 0 end
  local waiting = requeued > 0 and redis.call('ZRANGE', prefix .. ':requeued', 0, requeued - 1)
  for i = 1, requeued do
    if waiting[i] ~= (tickets[i] or {}).id then return 0 end
  end
  for _, ticket in ipairs(tickets) do
    local id = ticket.id
    local epoch, row = string.match(id, '^(%d+)-(%d+)$')
    if redis.call('ZSCORE', prefix .. ':outstanding', id) or redis.call('GETBIT', prefix .. ':trained:' .. epoch, row) == 1 then
      return redis.error_reply('OUTOFORDER ticket ' .. id .. ' was issued before')
    end
  end
  local places = {}
  for i, ticket in ipairs(tickets) do
    add_ticket(prefix, lane_of(string.sub(args[5], i, i), '0'), ticket.id, ticket.body)
    places[2 * i - 1], places[2 * i] = cursor + i - 1, ticket.id
  end
  call_over(places, 'ZADD', prefix .. ':outstanding')
  if requeued > 0 then redis.call('ZREMRANGEBYRANK', prefix .. ':requeued', 0, requeued - 1) end
  for i = 1, epochs do redis.call('HSET', prefix .. ':order', 'rows:' .. args[5 + 2 * i], args[6 + 2 * i]) end
  redis.call('HSET', prefix .. ':order', 'state', args[3])
  redis.call('HSET', prefix .. ':run', 'cursor', cursor + n)
  redis.call('HINCRBY', prefix .. ':run', 'slots_used', n)
  count(prefix, 'issued', n - requeued)
  notify(prefix, 'tickets')
  return n
end, true)

-- args: leader fence, a text with a 1 in the place of each ticket that is for environments, then ticket id and body of each.
-- Issues tickets that a restore interrupted again: under their old sequence, on the slots they hold. A fork may have fewer slots
-- than its origin: a ticket with as many before it waits until some of these are published, or it would be sampled too early.
-- Skips those that were issued again before, which makes a repeated call harmless. Returns how many were issued.
register_leader('issue_again', {'rollouts', TEXT, EACH, 'ticket', TICKET, 'body', TEXT}, function(prefix, args)
  local issued, slots, used = 0, number(prefix, 'slots'), number(prefix, 'slots_used')
  for i = 3, #args, 2 do
    local seq = redis.call('ZSCORE', prefix .. ':reissue', args[i])
    if seq then
      local later = redis.call('ZCOUNT', prefix .. ':outstanding', seq, '+inf') + redis.call('ZCOUNT', prefix .. ':replay:order', seq, '+inf')
      if used - later >= slots then break end
      redis.call('ZREM', prefix .. ':reissue', args[i])
      add_ticket(prefix, lane_of(string.sub(args[2], (i - 1) / 2, (i - 1) / 2), '0'), args[i], args[i + 1])
      issued = issued + 1
    end
  end
  if issued > 0 then notify(prefix, 'tickets') end
  return issued
end, true)

-- Return the reply to a claim whose first reply was lost: the entries that it took, as far as they are still held.
local function claimed_again(prefix, consumer, entries, scan)
  local reply = {scan}
  for _, entry in ipairs(entries) do
    local holder, fence = string.match(redis.call('HGET', prefix .. ':claims', entry) or '', '^(.*)|(%d+)$')
    local stream = stream_of(prefix, entry)
    local found = holder == consumer and redis.call('XRANGE', stream, entry, entry)[1]
    if found then
      for _, each in ipairs({entry, fence, found[2][2], found[2][4] or ''}) do reply[#reply + 1] = each end
    end
  end
  return reply
end

-- args: consumer, policy version held, fence of the trainer that sent it, lease ms, count, scan position, adopt (1: also own
-- pending entries), max expiries, boot of the consumer's process and ordinal of its call, rollouts (1: of environments),
-- evaluates (1: of the open evaluation round).
-- Order: own pending (after a restart), expired leases, new tickets. Claims nothing while generators are paused, the run ends or
-- the weights are not the published ones; of an evaluation round, if they are not the round's, a ticket of it failed for good, or
-- the consumer is a generator that does not stay on them. Returns {scan position, entry, fence, ticket, body, …}, and to a repeated
-- call the same claims; a call that comes after a later one claims nothing.
register('claim', {
  'consumer', TEXT, 'version', INTEGER, 'sender', NATURAL, 'lease ms', NATURAL, 'wanted', AMOUNT, 'scan', ENTRY, 'adopt', FLAG,
  'max expiries', NATURAL, 'boot', TEXT, 'ordinal', NATURAL, 'rollouts', FLAG, 'evaluates', FLAG,
}, function(prefix, args)
  local consumer, lease_ms, wanted, scan, adopt = args[1], args[4], tonumber(args[5]), args[6], args[7]
  if wanted == 0 then return {scan} end -- to the commands below, 0 means all
  local before = taken_before(prefix .. ':claimed', consumer, args[9], args[10])
  if before then return claimed_again(prefix, consumer, before, scan) end
  local stream, group = stream_of(prefix, lane_of(args[11], args[12]) .. '-')
  local state = redis.call('HMGET', prefix .. ':run', 'published_version', 'published_by', 'paused:generator', 'stopping', 'finished')
  if state[3] or state[4] or state[5] then return {scan} end
  if args[12] == '1' then
    local round = redis.call('HMGET', prefix .. ':eval:round', 'version', 'fault')
    local stays = args[11] == '1' or redis.call('HEXISTS', prefix .. ':eval:volunteers', consumer) == 1
    if round[1] ~= args[2] or round[2] or not stays then return {scan} end
  elseif state[1] ~= args[2] or state[2] ~= args[3] then
    return {scan}
  end
  renew_after_step(prefix)
  local taken, looked_at = {}, {}
  local function take(entries)
    for _, entry in ipairs(entries) do taken[#taken + 1] = entry end
  end
  local function take_again(entries)
    local once = {}
    for _, entry in ipairs(entries) do
      if not looked_at[entry[1]] then once[#once + 1] = entry end
      looked_at[entry[1]] = true
    end
    take(survivors(prefix, once, tonumber(args[8])))
  end
  local function read(id)
    local reply = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', wanted - #taken, 'STREAMS', stream, id)
    return reply and reply[1][2] or {}
  end
  if adopt == '1' then take_again(read('0')) end
  if #taken < wanted then
    local reply = redis.call('XAUTOCLAIM', stream, group, consumer, lease_ms, scan, 'COUNT', wanted - #taken)
    scan = reply[1]
    for former in pairs(holders(prefix, reply[2])) do
      if former ~= consumer then delete_consumer(stream, group, former) end
    end
    take_again(reply[2])
  end
  if #taken < wanted then take(read('>')) end
  local reply, claims, entries, fences = {scan}, {}, {}, next_fences(prefix, 'claim_fence', #taken)
  for i, entry in ipairs(taken) do
    claims[2 * i - 1], claims[2 * i] = entry[1], consumer .. '|' .. fences[i]
    entries[i] = entry[1]
    reply[#reply + 1] = entry[1]
    reply[#reply + 1] = fences[i]
    reply[#reply + 1] = entry[2][2]
    reply[#reply + 1] = entry[2][4] or ''
  end
  call_over(claims, 'HSET', prefix .. ':claims')
  record_taken(prefix .. ':claimed', consumer, args[9], args[10], entries)
  return reply
end)

-- args: consumer, then entry and fence of each. Renews the leases still held. Returns the entries that are lost.
register('renew', {'consumer', TEXT, EACH, 'entry', ENTRY, 'fence', NATURAL}, function(prefix, args)
  local lost = {}
  for i = 2, #args, 2 do
    if owns(prefix, args[1], args[i], args[i + 1]) then
      local stream, group = stream_of(prefix, args[i])
      redis.call('XCLAIM', stream, group, args[1], 0, args[i], 'JUSTID')
    else
      lost[#lost + 1] = args[i]
    end
  end
  return lost
end)

-- args: consumer, entry, fence, tokens saved of it. Hands a ticket back unfinished. Returns 0 if it was no longer held.
register('release', {'consumer', TEXT, 'entry', ENTRY, 'fence', NATURAL, 'tokens', NATURAL}, function(prefix, args)
  if not owns(prefix, args[1], args[2], args[3]) then return 0 end
  if args[4] ~= '0' then count(prefix, 'handed_back_tokens', args[4]) end
  hand_back(prefix, args[1], args[2])
  return 1
end)

-- args: consumer, entry, fence, ticket, body, max attempts, reason. Hands a ticket back after a failure, or makes it a dead
-- letter; one of an evaluation round ends the round. Returns 1 for that, 0 if handed back, -1 if it was no longer held.
register('fail', {
  'consumer', TEXT, 'entry', ENTRY, 'fence', NATURAL, 'ticket', TEXT, 'body', TEXT, 'max attempts', NATURAL, 'reason', TEXT,
}, function(prefix, args)
  local consumer, entry, fence, ticket, body, limit, reason = unpack(args)
  if not owns(prefix, consumer, entry, fence) then return -1 end
  if redis.call('HINCRBY', prefix .. ':attempts', entry, 1) >= tonumber(limit) then
    give_up(prefix, entry, ticket, reason, body)
    return 1
  end
  hand_back(prefix, consumer, entry)
  return 0
end)

-- Take in the group of a claim: its header to dataprep, or to the results of the evaluation round. Returns false if its payload is
-- missing.
local function take_in(prefix, group, payload)
  if of_round(group.entry) then
    redis.call('HSET', prefix .. ':eval:results', group.ticket, group.header)
    redis.call('HSET', prefix .. ':eval:round', 'finished_ms', run_ms(prefix))
    notify(prefix, 'evaluation')
    return true
  end
  local key = prefix .. ':payload:' .. payload
  if redis.call('PERSIST', key) == 0 and redis.call('EXISTS', key) == 0 then return false end
  redis.call('XADD', prefix .. ':headers', '*', 'ticket', group.ticket, 'payload', payload, 'body', group.header)
  if redis.call('XLEN', prefix .. ':headers') == 1 then notify(prefix, 'headers') end -- otherwise dataprep is still settling
  return true
end

-- Return the answer to a submission without a claim: 1 if an earlier call of the same claim was accepted.
local function submitted_before(prefix, group, payload)
  if of_round(group.entry) then
    return redis.call('HGET', prefix .. ':eval:results', group.ticket) == group.header and 1 or 0
  end
  local key = prefix .. ':payload:' .. payload
  if redis.call('TTL', key) == -1 then return 1 end
  redis.call('UNLINK', key)
  count(prefix, 'refused_submits', 1)
  return 0
end

-- args: consumer, entry, fence, ticket, header of each group. The payloads were written before, with an expiry; the headers
-- commit them. A group of an evaluation round has no payload. Returns of each: 1 if accepted, now or by an earlier call of the same
-- claim; 0 if the ticket was no longer held (counted, and the payload deleted); -1 if the payload is missing; -2 if the header is
-- too large for an entry.
register('submit', {
  EACH, 'consumer', TEXT, 'entry', ENTRY, 'fence', NATURAL, 'ticket', TEXT, 'header', TEXT,
}, function(prefix, args)
  local answers, done, kept = {}, {}, {}
  for _, group in ipairs(records(args, 1, 'consumer', 'entry', 'fence', 'ticket', 'header')) do
    local payload = group.ticket .. '.' .. group.fence
    local answer = 1
    if #group.header > ENTRY_BYTES then
      answer = -2
    elseif not owns(prefix, group.consumer, group.entry, group.fence) then
      answer = submitted_before(prefix, group, payload)
    elseif take_in(prefix, group, payload) then
      redis.call('HDEL', prefix .. ':claims', group.entry)
      done[#done + 1] = group.entry
      kept[#kept + 1], kept[#kept + 2] = prefix .. ':partial:' .. group.ticket, prefix .. ':turns:' .. group.ticket
    else
      answer = -1
    end
    answers[#answers + 1] = answer
  end
  if #done > 0 then
    forget_tickets(prefix, done)
    call_over(kept, 'DEL')
  end
  return answers
end, true)

-- args: consumer, entry, fence, ticket, expiry s, tokens so far. Returns 0 if the ticket was no longer held.
register('save_partial', {
  'consumer', TEXT, 'entry', ENTRY, 'fence', NATURAL, 'ticket', TEXT, 'expiry s', POSITIVE, 'tokens', TEXT,
}, function(prefix, args)
  if not owns(prefix, args[1], args[2], args[3]) then return 0 end
  redis.call('SET', prefix .. ':partial:' .. args[4], args[6], 'EX', args[5])
  return 1
end, true)

-- args: expiry s, then consumer, entry, fence, ticket, sample, how often its rollout has started again, place and record of each.
-- Appends to the history of rollouts: a turn before its tools run, or the environment's reply. Returns of each: 1, also
-- to a repeated call; 0 if the ticket was no longer held or the rollout has started again since; -1 if there is no record before it.
register('commit_turn', {
  'expiry s', POSITIVE, EACH, 'consumer', TEXT, 'entry', ENTRY, 'fence', NATURAL, 'ticket', TEXT, 'sample', NATURAL,
  'restarts', NATURAL, 'place', NATURAL, 'record', TEXT,
}, function(prefix, args)
  local answers = {}
  for i = 2, #args, 8 do
    local key, sample, place, answer = prefix .. ':turns:' .. args[i + 3], args[i + 4], tonumber(args[i + 6]), 0
    if owns(prefix, args[i], args[i + 1], args[i + 2]) then
      local before = redis.call('HMGET', key, sample, sample .. ':' .. place - 1)
      if (before[1] or '0') ~= args[i + 5] then
        answer = 0
      elseif place > 0 and not before[2] then
        answer = -1
      else
        redis.call('HSETNX', key, sample .. ':' .. place, args[i + 7])
        if place % 16 == 0 then redis.call('EXPIRE', key, args[1]) end -- for every record, this would be a third of the time
        answer = 1
      end
    end
    answers[#answers + 1] = answer
  end
  return answers
end, true)

-- args: consumer, entry, fence, ticket, sample, how often its rollout has started again, including this time, expiry s. Deletes
-- the history of a rollout, which starts again. Returns 1, also to a repeated call; 0 if the ticket was no longer held, or the
-- rollout has started again since.
register('restart_rollout', {
  'consumer', TEXT, 'entry', ENTRY, 'fence', NATURAL, 'ticket', TEXT, 'sample', NATURAL, 'restarts', POSITIVE, 'expiry s', POSITIVE,
}, function(prefix, args)
  if not owns(prefix, args[1], args[2], args[3]) then return 0 end
  local key, sample = prefix .. ':turns:' .. args[4], args[5]
  local before, now = tonumber(redis.call('HGET', key, sample) or '0'), tonumber(args[6])
  if before >= now then return before == now and 1 or 0 end
  local place = 0
  while redis.call('HDEL', key, sample .. ':' .. place) == 1 do place = place + 1 end
  redis.call('HSET', key, sample, args[6])
  redis.call('EXPIRE', key, args[7])
  return 1
end)
